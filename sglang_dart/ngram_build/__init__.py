"""Count the n-grams of a corpus: documents → tokens → windows → sorted counts → model."""
