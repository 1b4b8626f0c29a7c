// Readable names of sites.

/**
 * @param {string} site
 * @returns {string}
 */
export function named(site) {
  const found = /^(encoder\.|decoder\.)?(cross_)?(\w+?)\.(\d+)(?:\[(.*)\])?$/.exec(site);
  if (!found) return site;
  const [, stack = "", cross = "", kind, layer, inside = ""] = found;
  /** @type {Record<string, string>} */
  const index = Object.fromEntries(
    inside
      .split(",")
      .filter(Boolean)
      .map((one) => one.split("=").map((half) => half.trim())),
  );
  const attention = cross ? "cross-attention" : "attention";
  const what =
    {
      z: "head" in index ? `${cross ? "cross-attention " : ""}head ${index.head}` : `all ${attention} heads`,
      attn_out: `all ${attention}`,
      ffn_out: "feed-forward",
      resid_post: "residual stream",
    }[kind] ?? kind;
  const where = "position" in index ? `, token ${index.position}` : "";
  return `${stack ? `${stack.slice(0, -1)} ` : ""}layer ${layer} · ${what}${where}`;
}
