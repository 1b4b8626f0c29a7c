// What Python declares and writes into the page: the views in the order of their tabs, the default state, and whether
// the page is served beside the API.

/** @type {{ views: ViewEntry[], state: PageState, served: boolean }} */
const manifest = JSON.parse(document.getElementById("manifest")?.textContent ?? "");

export const { views, state, served } = manifest;
