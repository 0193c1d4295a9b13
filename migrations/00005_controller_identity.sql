-- Controllers call each other: the certificate that a peer must show carries
-- its lasting id, which is another one than that of its present start. The host
-- tells whether two of them run on one machine. Programs of before this file
-- leave both empty and are not called.

-- +goose Up
SET LOCAL lock_timeout = '2s';

ALTER TABLE controller ADD COLUMN identity uuid, ADD COLUMN host text NOT NULL DEFAULT '';
