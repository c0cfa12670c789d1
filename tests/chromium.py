"""A real browser that a test operates by its keyboard alone (Chrome DevTools Protocol)."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

KEYS = {"Tab": 9, "Enter": 13, "Space": 32}


@dataclass
class Keyboard:
    """A page of Chromium and its keyboard."""

    socket: aiohttp.ClientWebSocketResponse
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    async def call(self, method: str, **values: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self.socket.send_json({"id": number, "method": method, "params": values})
        while True:
            answer = await self.socket.receive_json(timeout=30)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    async def value(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.shows(f"location.href.startsWith({url!r})")

    async def shows(self, script: str) -> None:
        """Wait until the page is loaded and the script is true of it."""
        async with asyncio.timeout(30):
            while not await self.value(f"document.readyState == 'complete' && ({script})"):
                await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        name, text = {"Space": (" ", " "), "Enter": (key, "\r")}.get(key, (key, ""))
        about = {"key": name, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def tab_to(self, script: str, most: int = 40) -> None:
        """Press Tab until the script is true of the focused element ``it``."""
        for _ in range(most):
            await self.press("Tab")
            if await self.value(f"(it => {script})(document.activeElement)"):
                return
        raise AssertionError(f"{most} times Tab reach no element with {script}")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def draw(self, shot: Path, *, dark: bool = False) -> None:
        """Store a picture of the whole page."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        shot.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def keyboard(chromium: str, profile: Path) -> AsyncIterator[Keyboard]:
    """Start Chromium with an empty page."""
    profile.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        chromium,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1000,800"),
        *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        ready = profile / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not ready.exists() or not ready.read_text().strip():
                await asyncio.sleep(0.05)
        port = ready.read_text().split()[0]
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [one for one in await answer.json() if one["type"] == "page"]
            url = pages[0]["webSocketDebuggerUrl"]
            async with http.ws_connect(url, max_msg_size=0) as socket:
                yield Keyboard(socket)
    finally:
        process.terminate()
        await process.wait()
