"""What is asked of the store and told to it: plain functions over an open connection, inside its transaction."""
