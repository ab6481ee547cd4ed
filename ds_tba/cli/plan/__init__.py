"""Will it fit? Rows of what a model needs under each setting, made without the memory of training it."""
