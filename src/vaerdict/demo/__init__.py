"""Built-in demonstrations on data whose truth is known."""
