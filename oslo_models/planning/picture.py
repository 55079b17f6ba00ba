"""Draws a plan as one HTML page without other files: a bar of memory and the blocks of each rank."""

from __future__ import annotations

from html import escape

from oslo_models.planning.memory import GIB, Estimate, RankMemory
from oslo_models.planning.meta_run import PARTS
from oslo_models.planning.sizes import Choice, Devices, sizes_of

COLORS = dict(zip(PARTS, ("#3b6fb6", "#d9822b", "#8e5bb5", "#3f9b63", "#c94f4f", "#4aa6b5", "#8a8a8a"), strict=True))
_STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.4rem}h2{font-size:1rem;margin:1.4rem 0 .3rem}.bar{position:relative;height:1.8rem;background:#eee}
.bar span{position:absolute;top:0;bottom:0}.bar .limit{border-left:2px dashed #000;width:0}
.over{background:repeating-linear-gradient(45deg,#c00,#c00 4px,#fff 4px,#fff 8px);opacity:.6}
.key span{display:inline-block;width:.9rem;height:.9rem;margin:0 .3rem 0 1rem;vertical-align:-.1rem}
.key .limit{border-left:2px dashed #000;width:0;height:1.1rem}
.blocks{display:flex;flex-wrap:wrap;gap:3px;margin:.4rem 0}
.blocks span{background:#dfe8f5;border-radius:3px;font-size:.75rem;padding:0 .4rem}.bad{color:#b00020}
"""


def page(found: Estimate, devices: Devices | None = None, choice: Choice | None = None) -> str:
    """Return the page of an estimate.

    Args:
        devices: draws the limit of each device.
        choice: adds its reason.
    """
    job = found.job
    limits = [devices.limit(job, rank) if devices else None for rank in found.ranks]
    widest = max([rank.total for rank in found.ranks] + [limit for limit in limits if limit]) * 1.02
    key = "".join(f'<span style="background:{COLORS[part]}"></span>{part}' for part in PARTS)
    if devices is not None:
        key += '<span class="limit"></span>usable memory of the device'
    replicas = job.data_parallel_size
    sizes = (
        f"{job.task}, {sizes_of(job)}, {replicas} replica{'s' * (replicas != 1)}, "
        f"{job.batch} x {job.length} tokens, {str(job.dtype).removeprefix('torch.')}"
    )
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Plan of {escape(job.cls.__name__)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(job.cls.__name__)}: memory of each rank</h1><p>{escape(sizes)}</p>",
    ]
    if choice is not None:
        lines.append(f"<p{'' if choice.fits else ' class=bad'}>{escape(choice.reason)}</p>")
    lines.append(f'<p class="key">{key}</p>')
    for rank, limit in zip(found.ranks, limits, strict=True):
        lines += _rank(rank, limit, widest)
    return "\n".join([*lines, "</body></html>", ""])


def _rank(rank: RankMemory, limit: int | None, widest: float) -> list[str]:
    over = rank.total - limit if limit is not None else 0
    state = f' <b class="bad">{over / GIB:.2f} GiB too much</b>' if over > 0 else ""
    bar, left = [], 0.0
    for part, size in rank.parts.items():
        width = 100 * size / widest
        title = f"{part}: {size / GIB:.2f} GiB"
        bar.append(
            f'<span style="left:{left:.3f}%;width:{width:.3f}%;background:{COLORS[part]}" title="{title}"></span>'
        )
        left += width
    if limit is not None:
        edge = 100 * limit / widest
        if over > 0:
            bar.append(f'<span class="over" style="left:{edge:.3f}%;width:{left - edge:.3f}%"></span>')
        bar.append(f'<span class="limit" style="left:{edge:.3f}%" title="limit: {limit / GIB:.2f} GiB"></span>')
    blocks = "".join(f'<span title="{size:,} bytes">{escape(name)}</span>' for name, size in rank.modules.items())
    return [
        f"<h2>{rank.name}: {rank.total / GIB:.2f} GiB{state}</h2>",
        f'<div class="bar">{"".join(bar)}</div><div class="blocks">{blocks}</div>',
    ]
