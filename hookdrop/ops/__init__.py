"""How masks are drawn and put on: what the regularizers' functions are made of."""
