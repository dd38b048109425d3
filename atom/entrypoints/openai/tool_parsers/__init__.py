"""Tool calls out of generated text: one dialect a file, chosen through ``registry``, driven through ``base``."""
