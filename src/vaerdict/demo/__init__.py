"""Built-in demonstrations: data whose truth is known, the answer and the truth beside it."""
