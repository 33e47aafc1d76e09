"""The decisions about shared streams: members, fan-out, redelivery, offsets."""
