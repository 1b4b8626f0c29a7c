// Edits with undo and redo.

/** @type {Record<"past" | "future", Pick<PageState, "edits" | "patch_from">[]>} */
const kept = { past: [], future: [] }; // kept across views while the page is open

/**
 * @param {ViewContext} context
 * @returns {EditHistory}
 */
export function history(context) {
  const now = () => ({ edits: context.state.edits, patch_from: context.state.patch_from });
  let latest = "";
  /**
   * @param {typeof kept.past} from
   * @param {typeof kept.past} to
   */
  function move(from, to) {
    const next = from.pop();
    if (!next) return;
    to.push(now());
    latest = "";
    context.set(next);
  }
  /** @type {EditHistory} */
  const made = {
    /** Apply changes; consecutive ones of one `kind`, such as slider movements, are undone together. */
    make(changes, kind = "") {
      if (!kind || kind !== latest) kept.past.push(now());
      latest = kind;
      kept.future.length = 0;
      context.set(changes);
    },
    /** Set the edit of a site; null removes it. */
    put(site, edit, more = {}, kind = "") {
      const { edits } = context.state;
      const at = edits.findIndex((one) => one.site === site);
      const next = at < 0 ? [...edits, edit] : edits.map((one, i) => (i === at ? edit : one));
      made.make({ edits: next.filter((one) => one !== null), ...more }, kind);
    },
    undo: () => move(kept.past, kept.future),
    redo: () => move(kept.future, kept.past),
    get canUndo() {
      return kept.past.length > 0;
    },
    get canRedo() {
      return kept.future.length > 0;
    },
    key(event) {
      if (event.defaultPrevented || !(event.ctrlKey || event.metaKey) || event.altKey) return;
      if (event.target instanceof Element && event.target.closest("textarea, input[type=text], input[type=number]"))
        return;
      const name = event.key.toLowerCase();
      if (name === "z" && event.shiftKey) made.redo();
      else if (name === "z") made.undo();
      else if (name === "y") made.redo();
      else return;
      event.preventDefault();
    },
  };
  return made;
}
