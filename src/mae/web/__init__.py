"""A page in which one draws a mask and sees what a model makes of it, in the browser alone."""
