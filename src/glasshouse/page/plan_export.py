"""The plan of a run as one HTML file, by the script that draws it on the page."""

from __future__ import annotations

import html

from glasshouse.page.html_export import standalone
from glasshouse.page.page_files import static_files
from glasshouse.training.plan import TrainingPlan


def plan_page(name: str, plan: TrainingPlan) -> str:
    """Return a page with the picture of a plan that needs no server.

    >>> import glasshouse as gh
    >>> planner = gh.training.plan
    >>> page = plan_page("stdlib", planner.plan_training(gh.Run.load("stdlib"), planner.find_gpu("h200")))
    >>> page.count("<title>Plan of stdlib</title>"), "http://" in page.replace("http://www.w3.org", "")
    (1, False)
    """
    page = static_files()["index.html"].decode()
    page = page.replace("</head>", '<link rel="stylesheet" href="/static/views/run/view.css">\n</head>')
    page = page.replace("<title>Glasshouse</title>", f"<title>Plan of {html.escape(name)}</title>")
    return standalone(page, "plan", {"name": name, "plan": plan.to_dict()}, "plan_page.js")
