// An editor made with the npm library of the Agent Client Protocol, which checks every frame.
//
//     node editor.mjs SDK DIRECTORY STEPS COMMAND...
//
// starts COMMAND, does the steps, a JSON array, and prints what came as one JSON object: the
// results of the steps in order, and all updates. A step is [METHOD, PARAMS] or, to cancel a
// prompt as soon as a file is there, ["session/prompt", PARAMS, FILE]. A sessionId of null is the
// one of the last session/new.
import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { Readable, Writable } from "node:stream";
import { setTimeout as pause } from "node:timers/promises";
import { pathToFileURL } from "node:url";

const [sdk, cwd, steps, ...command] = process.argv.slice(2);
const { client, methods, ndJsonStream } = await import(pathToFileURL(sdk));
const child = spawn(command[0], command.slice(1), { cwd, stdio: ["pipe", "pipe", "inherit"] });
const updates = [];
const results = [];
let session = null;

const editor = client({ name: "editor" })
  .onNotification(methods.client.session.update, ({ params }) => void updates.push(params.update))
  .onRequest(methods.client.session.requestPermission, () => {
    throw new Error("nothing is asked");
  });
await editor.connectWith(
  ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout)),
  async (context) => {
    for (const [method, params, file] of JSON.parse(steps)) {
      if (params.sessionId === null) params.sessionId = session;
      const answer = context.request(method, params).then(
        (result) => ({ result }),
        (error) => ({ error: error.message }),
      );
      if (file) {
        while (!existsSync(file)) await pause(20);
        await context.notify(methods.agent.session.cancel, { sessionId: params.sessionId });
      }
      results.push(await answer);
      session = results.at(-1).result?.sessionId ?? session;
    }
  },
);
child.stdin.end();
const status = await new Promise((resolve) => child.on("close", resolve));
console.log(JSON.stringify({ results, updates, status }));
