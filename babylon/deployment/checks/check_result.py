"""What the checks of a policy came to: a line each, and the first failure as the reason."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Figures = Mapping[str, float | int | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. ``reason`` says what was found and, of a failure, what to do about it."""

    name: str
    passed: bool
    reason: str
    figures: Figures = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, failure: str | None, found: str = "", /, **figures: Any) -> "Check":
        """Passed unless there is a ``failure``; numbers that JSON has no word for become None."""
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in figures.items()
        }
        return cls(name=name, passed=failure is None, reason=failure or found, figures=plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How a policy stood its checks, in the order in which they were made."""

    policy_version: int
    champion_version: int
    gateways: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def reason(self) -> str:
        """The first failure with its numbers and the remedy, or that there is none."""
        for check in self.checks:
            if not check.passed:
                return f"{check.name}: {check.reason}"
        return f"all {len(self.checks)} checks passed"

    def as_json(self) -> dict[str, Any]:
        """Everything, with only what JSON has words for; the checks by name."""
        plain = asdict(self)
        checks = {check.pop("name"): check for check in plain["checks"]}
        return {"passed": self.passed, "reason": self.reason, **plain, "checks": checks}


def as_lines(stored: Mapping[str, Any]) -> dict[str, str]:
    """Stored checks as a person reads them: a line each."""
    return {
        name: check["reason"] if check["passed"] else f"FAILED: {check['reason']}"
        for name, check in stored["checks"].items()
    }
