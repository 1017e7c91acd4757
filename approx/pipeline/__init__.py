"""The line: checkpoint, plan, surgery, evaluate, bench, report. Each stage on its own, and all of them from a recipe."""
