"""What activation offload would do for a model, told without the memory that training it takes."""
