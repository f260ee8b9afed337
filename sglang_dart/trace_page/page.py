"""The HTML page of a trace: one file that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib

import jinja2

from sglang_dart.trace_page.view import TraceView, tint

# Scores shown as colours in the legend.
LEGEND = (0, -1, -3, -8, -20)


def render(trace: TraceView) -> str:
    """The page. Every word in it is escaped, and its only script is the one that it names."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sglang_dart.trace_page", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Rendered first: the policy names the very characters between the tags.
    script = environment.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        trace=trace,
        legend=[{"score": score, "tint": tint(score)} for score in LEGEND],
        script=script,
        script_digest=digest,
    )
