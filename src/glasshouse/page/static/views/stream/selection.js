// What is selected: a token, and a row of the table, of which the embedding is the first and each layer one more.

/** How many rows the table has. */
export function depth(glass) {
  return glass.model.n_layers + 1;
}

/** The row that is selected: 0 is the embedding. */
export function chosenRow(glass) {
  return glass.state.streamEmbed ? 0 : Math.min(glass.state.layer, glass.model.n_layers - 1) + 1;
}

export function rowName(number) {
  return number ? `layer ${number - 1}` : "embed";
}

/** Select a token and, where a row is given, that too. */
export function select(glass, place, number) {
  const last = glass.row.length - 1;
  const changes = { token: Math.max(0, Math.min(last, place)) };
  if (number !== undefined) Object.assign(changes, { layer: Math.max(0, number - 1), streamEmbed: number ? undefined : 1 });
  glass.set(changes);
}
