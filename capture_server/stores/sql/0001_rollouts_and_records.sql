-- One rollout is one row and an append-only history of records; nothing reaches across rollouts,
-- and every key starts with rollout_id, so that both tables can be distributed by it.

CREATE TABLE token_capture_rollouts (
    rollout_id text COLLATE "C" NOT NULL,
    head bigint NOT NULL,              -- token of the last append: names the whole history so far
    state text NOT NULL,               -- for listing only; the history decides
    retired_at double precision,       -- Unix time; set for tombstones
    PRIMARY KEY (rollout_id)
) WITH (fillfactor = 60);              -- room for the new version of a row on its own page

-- For the sweep: tombstones only.
CREATE INDEX token_capture_rollouts_retired_v1 ON token_capture_rollouts (rollout_id)
    WHERE retired_at IS NOT NULL;

CREATE TABLE token_capture_records (
    rollout_id text COLLATE "C" NOT NULL,
    pos integer NOT NULL,              -- 0, 1, 2, ... without gaps
    token bigint NOT NULL,             -- random, one per append
    line bytea NOT NULL,               -- the record, encoded as in the file store's journal
    arrays bytea,                      -- an entry's token arrays one after the other; else null
    PRIMARY KEY (rollout_id, pos)
);
-- Token ids hardly compress, and trying costs more than writing them.
ALTER TABLE token_capture_records ALTER COLUMN arrays SET STORAGE EXTERNAL;

-- Append to a history, if it is still the one that the caller knows (p_head at length p_pos; null:
-- there is none). Appended: one row at position -1. Not appended: the records from p_pos - 1 on,
-- so that the caller can check that its own are a part of them, take in the rest, and decide
-- again. Without lines nothing is written and the answer only says whether the caller is up to
-- date. With p_replace the lines take the place of all earlier records.
--
-- Both functions keep to what the distributed relatives of PostgreSQL understand: no PERFORM,
-- FOUND or GET DIAGNOSTICS, no SET clause.
CREATE FUNCTION token_capture_append_v1(
    p_rollout text,
    p_head bigint,
    p_pos integer,
    p_token bigint,
    p_state text,
    p_retired_at double precision,
    p_replace boolean,
    p_durable boolean,
    p_lines bytea[],
    p_arrays bytea[]
) RETURNS TABLE (o_pos integer, o_token bigint, o_line bytea)
LANGUAGE plpgsql
AS $$
DECLARE
    v_current boolean;
    v_first integer := p_pos;
    v_setting text;
BEGIN
    IF cardinality(p_lines) = 0 THEN
        SELECT (count(*) > 0) = (p_head IS NOT NULL) INTO v_current
            FROM token_capture_rollouts r
            WHERE r.rollout_id = p_rollout AND (p_head IS NULL OR r.head = p_head);
    ELSE
        v_setting := set_config('lock_timeout', '2s', true);
        IF NOT p_durable THEN
            v_setting := set_config('synchronous_commit', 'off', true);
        ELSIF current_setting('synchronous_commit') = 'off' THEN
            v_setting := set_config('synchronous_commit', 'on', true);
        END IF;
        IF p_head IS NULL THEN
            INSERT INTO token_capture_rollouts (rollout_id, head, state, retired_at)
                VALUES (p_rollout, p_token, coalesce(p_state, 'open'), p_retired_at)
                ON CONFLICT (rollout_id) DO NOTHING
                RETURNING true INTO v_current;
        ELSE
            -- Takes the row's lock; whoever comes second finds another head.
            UPDATE token_capture_rollouts
                SET head = p_token, state = coalesce(p_state, state), retired_at = p_retired_at
                WHERE rollout_id = p_rollout AND head = p_head
                RETURNING true INTO v_current;
        END IF;
    END IF;
    IF v_current IS NOT TRUE THEN
        -- A statement of its own: it sees what was committed while the lock was waited for.
        RETURN QUERY
            SELECT r.pos, r.token, r.line FROM token_capture_records r
            WHERE r.rollout_id = p_rollout AND r.pos >= p_pos - 1
            ORDER BY r.pos;
        RETURN;
    END IF;
    IF cardinality(p_lines) > 0 THEN
        IF p_replace THEN
            DELETE FROM token_capture_records WHERE rollout_id = p_rollout;
            v_first := 0;
        END IF;
        INSERT INTO token_capture_records (rollout_id, pos, token, line, arrays)
            SELECT p_rollout, v_first + x.n::integer - 1, p_token, x.line, x.arrays
            FROM unnest(p_lines, p_arrays) WITH ORDINALITY AS x (line, arrays, n);
    END IF;
    RETURN QUERY SELECT -1, p_token, NULL::bytea;
END
$$;

-- Remove a rollout; with p_retired_before only a tombstone at least that old. True: there was one.
CREATE FUNCTION token_capture_delete_v1(
    p_rollout text, p_retired_before double precision
) RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_existed boolean;
    v_setting text;
BEGIN
    v_setting := set_config('lock_timeout', '2s', true);
    IF current_setting('synchronous_commit') = 'off' THEN
        v_setting := set_config('synchronous_commit', 'on', true);
    END IF;
    DELETE FROM token_capture_rollouts
        WHERE rollout_id = p_rollout
        AND (p_retired_before IS NULL OR retired_at <= p_retired_before)
        RETURNING true INTO v_existed;
    IF v_existed IS NOT TRUE THEN
        RETURN false;
    END IF;
    -- A statement of its own: it sees what was appended up to the lock that we now hold.
    DELETE FROM token_capture_records WHERE rollout_id = p_rollout;
    RETURN true;
END
$$;
