"""What a tokenizer of a policy keeps."""

import subprocess
import sys
from pathlib import Path

from babylon.policies.tokenizer import train_tokenizer

# Words of one tokenizer after the other, as of the policies of a day.
WORDS = """
import sys
import psutil
from babylon.core.memory import release_memory
from babylon.policies.tokenizer import load_tokenizer

def held():
    release_memory()
    return psutil.Process().memory_info().rss

before = 0
for day in range(4):
    tokenizer = load_tokenizer(sys.argv[1])
    for word in range(2000):
        tokenizer.encode(str(10**200 + word))
    before = before or held()
print((held() - before) // 1_000_000)
"""


def test_words_of_a_tokenizer_do_not_stay_in_the_process(tmp_path: Path) -> None:
    train_tokenizer(["m1 costs 0.4"], 300).save_pretrained(tmp_path)
    command = [sys.executable, "-c", WORDS, str(tmp_path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(told) < 5
