"""Pure decisions: state machines that take inputs and the time and return effects. Stdlib only, no I/O."""
