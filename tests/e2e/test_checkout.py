"""What a checkout shows and says about itself."""

from __future__ import annotations

import re


def test_the_demo_shows_every_step_on_installed_wheels(everything, projects):
    demo = str(projects["opgraft"] / "scripts" / "demo.py")
    said = everything.run(everything.interpreter, demo).stdout
    ran = re.findall(rf"^{re.escape('attention.clamp_position')} ran (\S+)", said, flags=re.MULTILINE)
    assert ["cpu_reference", "acme", "native", "native"] == [winner.split("/")[0] for winner in ran]
    assert 4 == said.count("[0, 0, 4, 0]\n")
    assert "[0, 0, 4, 0] on cpu, by cpu_reference/" in said
    assert "[0, 0, 4, 0] on acme:0, by acme/plugin" in said
    assert "denied by OPGRAFT_DENY" in said


def test_every_exception_from_lint_states_its_reason(projects):
    text = (projects["opgraft"] / "pyproject.toml").read_text(encoding="utf-8")
    lint = text[text.index("[tool.ruff.lint]") : text.index("[tool.ruff.lint.flake8")]
    exceptions = [line for lines in re.findall(r"= \[\n(.*?)\n\]", lint, re.DOTALL) for line in lines.splitlines()]
    assert len(exceptions) > 10
    assert [] == [line for line in exceptions if not re.search(r'",\s+# \S', line)]
