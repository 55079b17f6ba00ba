"""Check installed or unpacked releases against the contracts: ``python -m oslo_models.contracts``.

``python -m oslo_models.contracts transformers-5.25.0-py3-none-any.whl`` prints what that release changes, without
installing it. ``--record``, once the changes were looked at, adds its fingerprints to the checked ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from oslo_models.contracts import checks
from oslo_models.contracts.fingerprint import fingerprint, parameters
from oslo_models.contracts.listing import CONTRACTS, LAYERS, PACKAGES
from oslo_models.contracts.recorded import RECORDED
from oslo_models.contracts.sources import Sources, installed, unpacked

_HEADER = '''"""Fingerprints of the originals, with their versions: written by ``python -m oslo_models.contracts``."""

RECORDED: dict[str, dict[str, str]] = {
'''


def found_in(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield the keys of `RECORDED`, each with its fingerprint in a release."""
    if sources.package == "transformers":
        for contract in LAYERS.values():
            for original in contract.originals:
                name = checks.path_of(original)
                functions = sources.functions(name)
                if not functions:
                    continue
                if contract.selects:
                    yield f"{name} selects", checks.selection_of(functions[0])
                    used = sources.functions(f"{name.rpartition('.')[0].rpartition('.')[0]}.{checks.EAGER}")
                else:
                    yield name, fingerprint(functions[0])
                    used = functions[1:]
                yield from ((checks.helper_key(each.name), fingerprint(each)) for each in used)
    for each in CONTRACTS:
        if each.is_copied and each.original.startswith(f"{sources.package}."):
            functions = sources.functions(each.original)
            if functions:
                yield each.original, fingerprint(functions[0])
                yield from ((f"{each.original} {inner.name}", fingerprint(inner)) for inner in functions[1:])


def problems_in(sources: Sources) -> Iterator[str]:
    """Yield the differences between a release and the recorded fingerprints."""
    found: dict[str, set[str]] = {}
    for key, value in found_in(sources):
        found.setdefault(key, set()).add(value)
    names = {checks.path_of(original) for each in LAYERS.values() for original in each.originals}
    for key in sorted(names) if sources.package == "transformers" else ():
        if key not in found and f"{key} selects" not in found:
            yield f"{key} is gone"
    for key, values in found.items():
        if values - RECORDED.get(key, {}).keys():
            yield f"{key} changed"
    for contract in CONTRACTS:
        if not contract.original.startswith(f"{sources.package}."):
            continue
        functions = sources.functions(contract.original)
        if functions and contract.parameters:
            names_now = tuple(name for name in parameters(functions[0]) if name in contract.parameters)
            if names_now != contract.parameters:
                yield f"{contract.original} changed its parameters: it has {', '.join(parameters(functions[0]))}"
        elif not functions and (contract.parameters or contract.is_copied):
            yield f"{contract.original} is gone"


def record(sources: Sources, number: str) -> int:
    """Add the fingerprints of a release. Return the number of new fingerprints."""
    made = {key: dict(values) for key, values in RECORDED.items()}
    new = 0
    for key, value in found_in(sources):
        known = made.setdefault(key, {}).get(value, "").split()
        new += not known
        made[key][value] = " ".join(checks.sorted_versions({*known, number.partition("+")[0]}))
    lines = [_HEADER]
    for key in sorted(made):
        lines.append(f'    "{key}": {{\n')
        lines += [f'        "{value}": "{numbers}",\n' for value, numbers in sorted(made[key].items())]
        lines.append("    },\n")
    Path(checks.__file__).with_name("recorded.py").write_text("".join([*lines, "}\n"]))
    RECORDED.update(made)
    return new


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m oslo_models.contracts", description=__doc__)
    parser.add_argument(
        "releases", nargs="*", type=Path, help="wheels or unpacked folders; default: the installed ones"
    )
    parser.add_argument("--record", action="store_true", help="add their fingerprints to the checked ones")
    given = parser.parse_args()
    if given.releases:
        releases = [unpacked(path, PACKAGES) for path in given.releases]
    else:
        releases = [(each, version(each.package)) for each in map(installed, PACKAGES) if each is not None]
    failed = False
    for sources, number in releases:
        if given.record:
            print(f"{sources.package} {number}: {record(sources, number)} new fingerprints recorded")
            continue
        problems = list(problems_in(sources))
        failed |= bool(problems)
        print(f"{sources.package} {number}: {'differs' if problems else 'as recorded'}")
        print("".join(f"  {problem}\n" for problem in problems), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
