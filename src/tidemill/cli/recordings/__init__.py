"""`tidemill record` and `tidemill trace`: the recordings on this machine."""
