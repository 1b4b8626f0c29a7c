// What Python declares and writes into the page: the views in the order of their tabs, and the default state.

export const { views, state } = JSON.parse(document.getElementById("manifest").textContent);
