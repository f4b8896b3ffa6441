"""Share one time axis among the panels of a picture: its ticks, its visible window, a cursor and a selection."""
