"""The report as one self-contained page: every op against every rule."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING, Final

from opgraft.testing.rule import PRESENCE, PRESENCE_SUMMARY, Scope
from opgraft.testing.rules import RULES

if TYPE_CHECKING:
    from opgraft.testing.report import Outcome, Report, Result

__all__ = ["page"]

_MARKS: Final[dict[Outcome, tuple[str, str]]] = {
    "passed": ("pass", "\N{CHECK MARK}"),
    "failed": ("fail", "\N{BALLOT X}"),
    "skipped": ("skip", "\N{MIDDLE DOT}"),
    "expected failure": ("known", "x"),
    "unexpected pass": ("fail", "!"),
}
_WORST: Final = ("failed", "unexpected pass", "expected failure", "passed", "skipped")
_TITLES: Final = {
    Scope.BACKEND: "The backend as it is installed",
    Scope.KERNEL: "What a kernel declares",
    Scope.CALL: "What a kernel does",
}

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { margin-bottom: 0; } .verdict { font-size: 1.15rem; margin-top: .3rem; }
.good { color: #17803d; } .bad { color: #c62828; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; }
th { text-align: left; font-weight: 600; vertical-align: bottom; } td.mark { text-align: center; }
th.group { padding-top: 1.2rem; background: none; font-size: 1.05rem; border-bottom-width: 2px; }
td.rule code { white-space: nowrap; } td.rule small { display: block; opacity: .75; }
.pass { color: #17803d; } .fail { color: #fff; background: #c62828; font-weight: 700; }
.skip { opacity: .45; } .known { background: #f9a82555; }
.fault { border-left: 4px solid #c62828; padding: .1rem 1rem; margin: 1rem 0; background: var(--soft); }
.fault.known { border-color: #f9a825; background: var(--soft); } pre { white-space: pre-wrap; }
footer { margin-top: 2rem; opacity: .7; font-size: .9rem; }
"""

_LEGEND: Final = (
    "<footer>\N{CHECK MARK} passed, \N{BALLOT X} failed, x failed as expected, ! passed although listed as failing, "
    "\N{MIDDLE DOT} not applicable (point at it for the reason).</footer>"
)


def page(report: Report) -> str:
    """Write a report as HTML, without anything from elsewhere.

    Parameters
    ----------
    report
        What the suite found.

    Returns
    -------
    str
        A whole document.

    """
    owner = f"{report.distribution} {report.version}".strip() or "no metadata"
    mood = "good" if report.passed else "bad"
    reason = f": {report.reason}" if report.reason else ""
    counts = Counter(result.outcome for result in report.results)
    told = ", ".join(f"{counts[one]} {one}" for one in _MARKS if counts[one])
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Conformance of {escape(report.backend)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>Conformance of {escape(report.backend)}</h1>",
            f'<p class="verdict {mood}">{escape(report.verdict())}</p>',
            f"<p>{escape(owner)}, {escape(report.status)}{escape(reason)}. {escape(told)}, {report.seconds:.1f} s.</p>",
            *_faults(report),
            *_matrix(report),
            _LEGEND,
            "</body></html>",
            "",
        ]
    )


def _faults(report: Report) -> list[str]:
    parts = []
    for result in report.results:
        if result.is_bad or result.outcome == "expected failure":
            known = " known" if result.outcome == "expected failure" else ""
            parts += [
                f'<div class="fault{known}" id="{escape(_anchor(result))}">',
                f"<p><strong><code>{escape(result.rule)}</code></strong> on {escape(result.subject)}:",
                f"{escape(result.outcome)}<br>{escape(result.summary)}</p>",
                f"<p>{escape(result.message)}</p>",
            ]
            if result.example:
                door = f"  ({result.route})" if result.route else ""
                parts.append(f"<pre><code>{escape(result.example)}</code>{escape(door)}</pre>")
            parts.append("</div>")
    return parts


def _anchor(result: Result) -> str:
    return f"{result.op}-{result.kernel}-{result.device}-{result.rule}".replace(" ", "_")


def _matrix(report: Report) -> list[str]:
    columns = list(dict.fromkeys((r.op, r.kernel) for r in report.results if r.op))
    cells: dict[tuple[str, str, str], list[Result]] = {}
    for result in report.results:
        cells.setdefault((result.op, result.kernel, result.rule), []).append(result)
    head = "".join(f"<th>{escape(op)}<br><small>{escape(kernel)}</small></th>" for op, kernel in columns)
    parts = [f'<div class="scroll"><table><thead><tr><th>Rule</th>{head or "<th></th>"}</tr></thead><tbody>']
    for scope, title in _TITLES.items():
        parts.append(f'<tr><th class="group" colspan="{len(columns) + 1}">{title}</th></tr>')
        for name, summary in _rows(scope):
            label = f'<td class="rule"><code>{escape(name)}</code><small>{escape(summary)}</small></td>'
            if scope is Scope.BACKEND:
                row = _cell(cells.get(("", "", name), []), span=max(len(columns), 1))
            else:
                row = "".join(_cell(cells.get((op, kernel, name), [])) for op, kernel in columns)
            parts.append(f"<tr>{label}{row}</tr>")
    parts.append("</tbody></table></div>")
    return parts


def _rows(scope: Scope) -> list[tuple[str, str]]:
    presence = [(PRESENCE, PRESENCE_SUMMARY)] if scope is Scope.KERNEL else []
    return [(rule.name, rule.summary) for rule in RULES if rule.scope is scope] + presence


def _cell(results: list[Result], span: int = 1) -> str:
    wide = f' colspan="{span}"' if span > 1 else ""
    if not results:
        return f'<td class="mark skip" title="not run"{wide}></td>'
    worst = min(results, key=lambda result: _WORST.index(result.outcome))
    kind, mark = _MARKS[worst.outcome]
    text = mark
    if worst.is_bad or worst.outcome == "expected failure":
        text = f'<a class="{kind}" href="#{escape(_anchor(worst))}">{mark}</a>'
    title = escape("; ".join(filter(None, [worst.message, *worst.notes])) or worst.outcome, quote=True)
    return f'<td class="mark {kind}" title="{title}"{wide}>{text}</td>'
