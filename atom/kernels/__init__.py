"""Functions on tensors: ``registry`` chooses among ``reference`` (plain PyTorch, the oracle) and the rest."""
