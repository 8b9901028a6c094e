"""What goes where, as pure data: no torch, no process, no clock."""
