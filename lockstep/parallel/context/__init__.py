"""Context parallel: chunks of sequences, and attention over them."""
