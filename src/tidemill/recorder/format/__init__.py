"""The format of a recording: file layout, columns, frames, indexes and the database."""
