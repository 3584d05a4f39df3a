"""pytorchexample: handwritten digits in a federation."""
