"""The files of a recording: their layout, columns, frames, indexes and database."""
