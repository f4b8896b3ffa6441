"""An operator through the stages of its compilers."""
