"""Published claims as data, and what the runs here say about each: verdict, effect, interval, n."""
