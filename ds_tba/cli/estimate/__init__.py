"""The estimate of activation offload for a model, made without the memory of training the model."""
