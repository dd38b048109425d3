"""One file per architecture family; ``registry`` finds them by name."""
