"""The README's table of what the zoo has, made from the registry."""

from __future__ import annotations

from oslo_models import registry
from oslo_models.plan import Vocab

BEGIN, END = "<!-- architectures:begin -->", "<!-- architectures:end -->"


def table() -> str:
    """A row for each architecture: its classes by how their names end, those with a divided vocabulary in bold."""
    lines = ["| model type | classes | what it is |", "|---|---|---|"]
    for model_type in sorted(registry.ARCHITECTURES):
        prefix = registry.ARCHITECTURES[model_type]
        classes = []
        for name, cls in registry.model_classes(model_type).items():
            divided = any(isinstance(entry, Vocab) for entry in cls.head.values())  # type: ignore[attr-defined]
            ending = name.removeprefix(prefix)
            classes.append(f"**{ending}**" if divided else ending)
        lines.append(f"| `{model_type}` | {prefix}: {', '.join(classes)} | {_first_sentence(model_type)} |")
    return "\n".join(lines)


def renewed(text: str) -> str:
    """``text`` with the table between its markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def _first_sentence(model_type: str) -> str:
    return " ".join((registry.load(model_type).__doc__ or "").split("\n\n")[0].split())
