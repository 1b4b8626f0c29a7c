"""Results as HTML for notebooks, and as SVG pictures."""
