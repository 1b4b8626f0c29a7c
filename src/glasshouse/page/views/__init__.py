"""The views of the page: one module or package for each tab."""
