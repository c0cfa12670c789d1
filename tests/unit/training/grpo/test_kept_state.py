"""The state to which an update can return."""

import torch

from babylon.training.grpo.kept_state import keep, put_back


def test_a_later_copy_takes_the_memory_of_the_one_before() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    first = keep(model, optimizer)  # the optimiser has no moments yet
    at = [one.data_ptr() for one in first["weights"]]
    step()
    second = keep(model, optimizer, first)
    assert [one.data_ptr() for one in second["weights"]] == at
    weights = [one.clone() for one in second["weights"]]
    moments = second["optimizer"]["state"][0]["exp_avg"].clone()
    step()
    put_back(second, model, optimizer)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments)
