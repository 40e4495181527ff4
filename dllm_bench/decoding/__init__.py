"""The masked decoding loop and its pieces, one file each."""
