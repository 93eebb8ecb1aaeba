"""Where files are: paths and buckets that a user gives, and what files of data hold."""
