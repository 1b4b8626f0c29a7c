// The page of `glasshouse plan --open`: the picture of one plan.

import "glasshouse/colour.js"; // sets the theme
import { h } from "glasshouse/dom.js";
import { planPicture } from "glasshouse/plan.js";
import { panel } from "glasshouse/widgets.js";

const { name, plan } = JSON.parse(document.getElementById("plan")?.textContent ?? "");
const picture = planPicture();
document
  .getElementById("page")
  ?.replaceChildren(
    h(
      "main",
      { class: "run plan-page" },
      panel(`Plan of ${name}`, `Layout ${plan.layout.kind}: ${plan.layout.why}.`, picture),
    ),
  );
picture.show(plan);
