"""Results of a policy's checks: one line a check, and the first failure as the reason."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Figure = float | int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. ``reason`` is the finding and, for a failure, the remedy."""

    name: str
    passed: bool
    reason: str
    figures: Mapping[str, Figure] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, failure: str | None, found: str = "", /, **figures: Figure) -> "Check":
        """Passed unless there is a ``failure``. Non-finite figures become ``None`` for JSON."""
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in figures.items()
        }
        return cls(name=name, passed=failure is None, reason=failure or found, figures=plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The results of a policy's checks, in order."""

    policy_version: int
    champion_version: int
    gateways: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def reason(self) -> str:
        """The first failure with its numbers and remedy, or "all checks passed"."""
        for check in self.checks:
            if not check.passed:
                return f"{check.name}: {check.reason}"
        return f"all {len(self.checks)} checks passed"

    def as_json(self) -> dict[str, Any]:
        """All fields as plain JSON values, with the checks by name."""
        plain = asdict(self)
        checks = {check.pop("name"): check for check in plain["checks"]}
        return {"passed": self.passed, "reason": self.reason, **plain, "checks": checks}


def as_lines(stored: Mapping[str, Any]) -> dict[str, str]:
    """Stored checks as one readable line each."""
    return {
        name: check["reason"] if check["passed"] else f"FAILED: {check['reason']}"
        for name, check in stored["checks"].items()
    }
