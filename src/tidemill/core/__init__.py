"""Pure decisions: state machines that take inputs and the time, and return effects. No I/O."""
