-- Since when a controller has been fit to serve, null while it is not. The
-- controllers that start together open their public ports only when a majority
-- of them is. Programs of before this column ignore it.

-- +goose Up
SET LOCAL lock_timeout = '2s';

ALTER TABLE controller ADD COLUMN stable_at timestamptz;
