"""Process groups and the collectives over them."""
