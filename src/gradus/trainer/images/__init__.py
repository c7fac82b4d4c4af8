"""What a policy that reads images needs beside one that reads text."""
