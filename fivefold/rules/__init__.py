"""Rules of a recipe that need a model, a layout or a backend. No module here imports torch."""
