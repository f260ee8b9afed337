"""A generation as a page: token ids → labels, trees → rows and columns → SVG in one HTML file."""
