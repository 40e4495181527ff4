"""What a forward feeds, reuses and keeps."""
