"""Published runs beside what a plan predicts for them."""
